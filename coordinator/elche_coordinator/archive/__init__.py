"""What ended jobs have left: their records, models and logs."""

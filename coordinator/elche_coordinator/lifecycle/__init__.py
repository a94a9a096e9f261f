"""How a coordinator starts, leads or stands by, stops, and is backed up."""

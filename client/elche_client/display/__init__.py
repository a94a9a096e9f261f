"""What people and scripts see of a job: the live panel, lines, summaries, tables, timelines, records as JSON."""

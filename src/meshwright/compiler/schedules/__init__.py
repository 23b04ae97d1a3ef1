"""Pipeline schedules: each a pure function to a table of what every rank does in which order."""

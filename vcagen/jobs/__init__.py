"""Jobs whose options span rooms, one file a job."""

"""The interface of users' files: the job, its functions, and their arguments."""

"""Trainings on this machine: `elche run` of a job's file (`job_run`) or of a loop (`script_run`)."""

"""When ranks average and how many batches each makes until then: pure functions of speeds and of work that is left."""

"""Plans rounds: when ranks average, and how many batches each makes until then, by speeds and the work that is left."""

"""The contract of elche: messages, errors, and arithmetic on which all programs must agree."""

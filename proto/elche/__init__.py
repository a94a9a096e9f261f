"""The contract of elche: messages, errors, and the arithmetic that every program must agree on."""

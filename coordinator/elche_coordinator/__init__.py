"""The coordinator daemon of elche: decides who trains what, and when ranks average."""

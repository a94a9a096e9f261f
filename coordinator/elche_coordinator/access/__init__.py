"""Authentication of callers: tokens, certificates, the audit log."""

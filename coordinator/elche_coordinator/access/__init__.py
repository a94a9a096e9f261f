"""Authentication of callers: `credentials` checks what a caller presents; tokens, certificates, the audit log."""

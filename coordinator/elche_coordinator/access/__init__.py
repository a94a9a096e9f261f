"""Who may call: tokens, certificates, the audit log."""

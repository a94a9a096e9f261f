"""Generated messages and stubs of the control plane, version 1."""

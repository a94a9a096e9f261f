"""The command line: each command's arguments, options and help. A command imports what it does when it runs."""

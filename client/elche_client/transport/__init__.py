"""The way to a coordinator and back: addresses, channels, messages, uploads, downloads, output of ranks."""

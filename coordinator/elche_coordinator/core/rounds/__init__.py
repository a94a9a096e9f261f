"""The rounds of one generation of ranks: announced, revised, given up, committed."""

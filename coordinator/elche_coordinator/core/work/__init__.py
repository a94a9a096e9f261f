"""The books of samples: free, leased and committed."""

"""gRPC services, and what they share: checks of requests, and calls that several of them answer."""

"""The devices of a host: their discovery, their streams, and transfers to them."""

"""What tests share: simulations, real processes, fakes and devices."""

"""The demo model: made on this machine at first use, from demonstrations through the gateway."""

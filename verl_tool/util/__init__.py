"""What all packages share and no library offers."""

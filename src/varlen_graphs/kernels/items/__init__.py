"""From a row back to its item: what all kernels that read the item table share."""

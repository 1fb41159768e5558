"""What `vg.wrap` makes of the models of transformers."""

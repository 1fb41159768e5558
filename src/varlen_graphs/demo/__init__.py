"""The demo: photographs and a clip through a Qwen3-VL tower, eager and graphed, in one table."""

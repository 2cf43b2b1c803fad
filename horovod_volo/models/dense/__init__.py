"""Networks that predict every pixel: backbones with maps of several strides, necks, heads."""

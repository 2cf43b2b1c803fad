# Other names for what stands in tools/.
.PHONY: setup demo test lint bench

setup demo test lint bench:
	./tools/$@

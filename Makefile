# Each target calls the script of the same name in tools/.
.PHONY: setup demo test lint bench

setup demo test lint bench:
	./tools/$@

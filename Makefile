# Each target calls the script of the same name in tools/.
.PHONY: setup demo test lint bench docs

setup demo test lint bench docs:
	./tools/$@

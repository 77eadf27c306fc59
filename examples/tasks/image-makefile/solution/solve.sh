#!/bin/bash
set -e
cat > Makefile <<'MAKE'
PARTS = $(sort $(wildcard parts/*.txt))

out/report.txt: title.txt parts $(PARTS)
	mkdir -p out
	cat title.txt > $@
	cat $(PARTS) | tr a-z A-Z >> $@

.PHONY: clean
clean:
	rm -rf out
MAKE

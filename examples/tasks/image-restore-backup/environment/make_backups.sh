#!/bin/bash
# Makes a folder, changes it, and archives each state.
set -e
mkdir -p work/notes work/old backups
backup() { tar -C work --listed-incremental=state.snar -cf "backups/$1.tar" .; sleep 1.1; }
echo first > work/notes/a.txt; echo keep > work/notes/b.txt; echo old > work/old/c.txt
backup 0
echo second > work/notes/a.txt; rm work/old/c.txt; echo new > work/notes/d.txt
backup 1
rm work/notes/d.txt; rmdir work/old; echo 'third time' > work/e.txt; mv work/notes/b.txt work/notes/moved.txt
backup 2
echo fourth > work/notes/a.txt; echo late > work/late.txt
backup 3
rm -r work state.snar

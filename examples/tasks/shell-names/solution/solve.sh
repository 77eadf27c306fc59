#!/bin/bash
set -e
cat > count.sh <<'SHELL'
#!/bin/bash
cd -- "$1" || exit 1
find . -type f -name '*.txt' -printf '%P\n' | LC_ALL=C sort | while IFS= read -r file; do
    printf '%s %s\n' "$(grep -c '' < "./$file")" "$file"
done
SHELL

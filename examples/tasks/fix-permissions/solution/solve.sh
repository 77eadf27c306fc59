#!/bin/bash
set -e
find . -type f -exec chmod 644 {} +
find . -type f -name '*.pem' -exec chmod 600 {} +
find keys -type d -exec chmod 700 {} +
find bin -type f | while IFS= read -r file; do
    if head -n 1 "$file" | grep -q '^#!'; then chmod 755 "$file"; fi
done

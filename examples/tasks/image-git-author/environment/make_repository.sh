#!/bin/bash
# Makes a repository with forty commits of four authors.
set -e
git init -q -b main project
cd project
authors=(Ada Bela Carl Dora)
limit=100
for n in $(seq 40); do
    author=${authors[$((n * 7 % 4))]}
    case $n in
        9) limit=120 ;;
        23) limit=12 ;;
        31) limit=15 ;;
    esac
    printf 'limit = %d\nrevision = %d\n' "$limit" "$n" > "settings.ini"
    printf '%s\n' "entry $n of $author" >> "journal.txt"
    git add -A
    export GIT_AUTHOR_DATE="2024-01-01T00:00:00Z" GIT_COMMITTER_DATE="2024-01-01T00:00:00Z"
    git -c user.name="$author" -c user.email="${author,,}@example.org" commit -q -m "Change $n"
done

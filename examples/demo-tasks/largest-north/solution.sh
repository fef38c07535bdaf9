set -e
ls -l store
ls -S store | head -1 > largest.txt
cat largest.txt

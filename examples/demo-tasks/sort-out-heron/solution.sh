set -e
ls
mkdir -p docs src data && mv *.md docs/ && mv *.py src/ && mv *.csv data/
ls docs src data

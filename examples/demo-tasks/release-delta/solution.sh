set -e
git log --oneline && cat CHANGES
echo 'release 39' >> CHANGES && git add CHANGES && git commit -qm 'release 39' && git tag v39
git log --oneline --decorate

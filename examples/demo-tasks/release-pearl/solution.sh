set -e
git log --oneline && cat CHANGES
echo 'release 22' >> CHANGES && git add CHANGES && git commit -qm 'release 22' && git tag v22
git log --oneline --decorate

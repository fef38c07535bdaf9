set -e
git log --oneline && cat CHANGES
echo 'release 20' >> CHANGES && git add CHANGES && git commit -qm 'release 20' && git tag v20
git log --oneline --decorate

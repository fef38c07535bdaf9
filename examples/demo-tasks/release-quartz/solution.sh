set -e
git log --oneline && cat CHANGES
echo 'release 36' >> CHANGES && git add CHANGES && git commit -qm 'release 36' && git tag v36
git log --oneline --decorate

python3 - <<'EOF'
import json
assert json.load(open('package.json')) == json.loads(r"""{"name": "tulip", "version": "1.7.0", "keywords": ["maple", "birch"]}""")
EOF

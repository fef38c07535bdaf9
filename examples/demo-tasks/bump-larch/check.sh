python3 - <<'EOF'
import json
assert json.load(open('package.json')) == json.loads(r"""{"name": "larch", "version": "1.10.0", "keywords": ["grove", "amber"]}""")
EOF

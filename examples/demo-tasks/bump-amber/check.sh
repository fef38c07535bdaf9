python3 - <<'EOF'
import json
assert json.load(open('package.json')) == json.loads(r"""{"name": "amber", "version": "0.1.0", "keywords": ["islet", "river"]}""")
EOF

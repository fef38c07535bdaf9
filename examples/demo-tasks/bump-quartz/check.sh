python3 - <<'EOF'
import json
assert json.load(open('package.json')) == json.loads(r"""{"name": "quartz", "version": "1.4.0", "keywords": ["olive", "cedar"]}""")
EOF

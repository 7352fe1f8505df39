#!/usr/bin/python3
# SPDX-License-Identifier: MIT
"""The XML that docs/ceph.md gives for libvirt is what libvirt's schema for a domain takes.

usage: test_libvirt_xml.py DOCUMENT
"""
import os
import re
import sys
import tempfile

from harness import check, need, require, run, skip, status

SCHEMA = "/usr/share/libvirt/schemas/domain.rng"
DOMAIN = """<domain type='kvm'><name>vm1</name><memory unit='GiB'>4</memory>%s<os><type arch='x86_64'>hvm</type></os><devices>%s</devices></domain>
"""

need("xmllint")
if not os.path.exists(SCHEMA):
    skip("libvirt0, which brings libvirt's schemas, is not installed")
with open(sys.argv[1]) as doc:
    blocks = re.findall(r"```xml\n(.*?)```", doc.read(), re.S)
parts = [part for block in blocks for part in re.split(r"<!--.*?-->", block) if part.strip()]
require(len(parts) >= 3, "there is XML in the document")
for part in parts:
    part = part.replace("uuid='...'", "uuid='2ec115d7-3a88-3ceb-bc12-0ac909a6fd87'")
    memory = "".join(re.findall(r"<memoryBacking>.*?</memoryBacking>", part, re.S))
    with tempfile.NamedTemporaryFile("w", suffix=".xml") as f:
        f.write(DOMAIN % (memory, part.replace(memory, "")))
        f.flush()
        p = run("xmllint", "--noout", "--relaxng", SCHEMA, f.name)
    check("valid: " + part.strip(), p.returncode == 0, p.stderr)
sys.exit(status())

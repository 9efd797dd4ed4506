"""What the finder of misaligned accesses says of some lines of PTX; needs no compiler."""

import pytest
from ptx_alignment import find_misaligned

# A row of 40 numbers for each of a thread's turns, from `%rd3` on.
LINES = """
.visible .entry kernel(
	.param .u64 .ptr .align 256 kernel_param_0
)
{{
	.shared .align 16 .b8 shared_memory[4096];
	ld.param::entry.b64 	%rd1, [kernel_param_0];
	mov.u32 	%r1, %tid.x;
	ld.global.b32 	%r2, [%rd1+4];
	{ahead}
	mad.wide.s32 	%rd3, %r3, 4, %rd1;
$L__loop:
	ld.global.v2.b32 	{{%r5, %r6}}, [%rd3{offset}];
	add.s64 	%rd3, %rd3, {stride};
	@%p1 bra 	$L__loop;
	mov.b32 	%r7, shared_memory;
	add.s32 	%r8, %r7, {place};
	@%p2 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r8], [%rd9, {{%r1, %r2}}], [%r7];
	ret;
}}
"""
GOOD = {"ahead": "and.b32 \t%r3, %r2, -2;", "offset": "+32", "stride": 160, "place": 128}
BAD = {
    "begins anywhere": {"ahead": "mov.b32 \t%r3, %r2;"},
    "a thread each": {"ahead": "add.s32 \t%r3, %r1, 2;"},
    "odd beside": {"offset": "+4"},
    "odd from the second turn on": {"stride": 164},
    "a bulk copy to half a line": {"place": 64},
}


@pytest.mark.parametrize("ahead", ["and.b32 \t%r3, %r2, -2;", "shl.b32 \t%r3, %r1, 1;", "mul.lo.s32 \t%r3, %r2, 6;"])
def test_aligned(ahead):
    assert find_misaligned(LINES.format(**GOOD | {"ahead": ahead})) == []


def test_a_register_that_goes_on_as_another_number():
    """What stands in it first is aligned, what a loop adds to it afterwards is not."""
    good = LINES.format(**GOOD)
    reused = good.replace("\tret;", "\tadd.s32 \t%r7, %r7, 4;\n\t@%p1 bra \t$L__loop;\n\tret;")
    assert find_misaligned(reused) == []
    found = find_misaligned(reused.replace("\tadd.s32 \t%r8", "$L__again:\n\tadd.s32 \t%r8"))
    assert found and all("cp.async.bulk" in text for text in found)  # the copy's place, and its barrier's


@pytest.mark.parametrize("name", BAD)
def test_misaligned(name):
    (found,) = find_misaligned(LINES.format(**GOOD | BAD[name]))
    assert ("cp.async.bulk" if "copy" in name else "ld.global.v2") in found

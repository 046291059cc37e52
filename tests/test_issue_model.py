"""benchmark/issue_model.py: how it reads machine code, which way through the loop it takes, and its arithmetic."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmark" / "issue_model.py"
sys.path.insert(0, str(SCRIPT.parent))

# 16 rows, 16 keys, d = 16: 8 HMMA a tile.
TILE = "4TileINS0_4Sm75E6__halfXtlNS0_9TileShapeELi16ELi1ELi1ELi1ELi16ELi1ELi1ELi1EEEEE"
NAME = f"_ZN10flash_wmma3mma7forwardINS0_{TILE}LNS_8ProblemsE0EEEvNS_13ForwardParamsE"

# As cuobjdump -sass writes it: the prologue's loop, then the loop over K/V tiles with the copy of the next tile (0x50),
# a plain tile (0x90), the exact path (0x160), P V (0x260) and the end (0x300).
SASS = f"""
	code for sm_75

		Function : _Z5otherv
	.headerflags	@"EF_CUDA_SM75 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM75)"
        /*0000*/                   EXIT ;                                      /* 0x000000000000794d */
                                                                               /* 0x000fea0003800000 */

		Function : {NAME}
        /*0000*/                   S2R R6, SR_TID.X ;                          /* 0x0000000000067919 */
                                                                               /* 0x000e220000002100 */
        /*0010*/                   IADD3 R1, R1, -0x28, RZ ;                   /* 0xffffffd801017810 */
        /*0020*/              @!P0 BRA 0x10 ;                                  /* 0x00000e5000008947 */
        /*0030*/                   BAR.SYNC 0x0 ;                              /* 0x0000000000007b1d */
        /*0040*/              @!P1 BRA 0x70 ;                                  /* 0x0000002000009947 */
        /*0050*/                   LDG.E.128.SYS R4, [R12] ;                   /* 0x000000000c047381 */
        /*0060*/                   LDG.E.128.SYS R8, [R16] ;                   /* 0x0000000010087381 */
        /*0070*/               @P0 BRA 0x300 ;                                 /* 0x0000028000000947 */
        /*0080*/               @P2 BRA 0x150 ;                                 /* 0x000000c000002947 */
        /*0090*/                   LDSM.16.M88.4 R108, [R102] ;                /* 0x00000000666c783b */
        /*00a0*/                   HMMA.1688.F32 R112, R36, R108, RZ ;         /* 0x0000006c2470723c */
        /*00b0*/                   HMMA.1688.F32 R132, R36, R110.reuse, RZ ;   /* 0x0000006e2484723c */
        /*00c0*/                   HMMA.1688.F32 R112, R38, R109, R112 ;       /* 0x0000006d2670723c */
        /*00d0*/                   HMMA.1688.F32 R132, R38, R111, R132 ;       /* 0x0000006f2684723c */
        /*00e0*/                   FFMA R0, R112, R249, R2 ;                   /* 0x000000f970007223 */
        /*00f0*/                   MUFU.EX2 R0, R0 ;                           /* 0x0000000000007308 */
        /*0100*/                   F2F.F16.F32 R1, R0 ;                        /* 0x0000000000017304 */
        /*0110*/                   PRMT R1, R1, 0x5410, R2 ;                   /* 0x0000541001017816 */
        /*0120*/                   FSETP.LE.AND P3, PT, R0, 60000, PT ;        /* 0x476a600000007810 */
        /*0130*/                   BRA.DIV 0x340 ;                             /* 0x0000020000007947 */
        /*0140*/                   VOTE.ANY R24, PT, P3 ;                      /* 0x0000000000187806 */
        /*0150*/               @P3 BRA P1, 0x260 ;                             /* 0x0000010000003947 */
        /*0160*/                   LDSM.16.M88.4 R108, [R102] ;                /* 0x00000000666c783b */
        /*0170*/                   HMMA.1688.F32 R112, R36, R108, RZ ;         /* 0x0000006c2470723c */
        /*0180*/                   HMMA.1688.F32 R132, R36, R110, RZ ;         /* 0x0000006e2484723c */
        /*0190*/                   HMMA.1688.F32 R112, R38, R109, R112 ;       /* 0x0000006d2670723c */
        /*01a0*/                   HMMA.1688.F32 R132, R38, R111, R132 ;       /* 0x0000006f2684723c */
        /*01b0*/                   FMUL R0, R112, R249 ;                       /* 0x000000f970007220 */
        /*01c0*/                   FMNMX R3, R0, R3, !PT ;                     /* 0x0000000300037209 */
        /*01d0*/                   SHFL.BFLY PT, R5, R3, 0x1, 0x1f ;           /* 0x0c201f0003057f89 */
        /*01e0*/                   SHFL.BFLY PT, R5, R3, 0x2, 0x1f ;           /* 0x0c401f0003057f89 */
        /*01f0*/                   FADD R0, R0, -R3 ;                          /* 0x8000000300007221 */
        /*0200*/                   MUFU.EX2 R0, R0 ;                           /* 0x0000000000007308 */
        /*0210*/                   MUFU.EX2 R3, R3 ;                           /* 0x0000000300037308 */
        /*0220*/                   F2F.F16.F32 R1, R0 ;                        /* 0x0000000000017304 */
        /*0230*/                   FMUL R8, R8, R3 ;                           /* 0x0000000308087220 */
        /*0240*/                   FMUL R9, R9, R3 ;                           /* 0x0000000309097220 */
        /*0250*/                   PRMT R1, R1, 0x5410, R2 ;                   /* 0x0000541001017816 */
        /*0260*/                   LDSM.16.MT88.4 R200, [R230+0x4000] ;        /* 0x00400000e6c8783b */
        /*0270*/                   HMMA.1688.F32 R8, R1, R200, R8 ;            /* 0x000000c80108723c */
        /*0280*/                   HMMA.1688.F32 R12, R1, R201, R12 ;          /* 0x000000c9010c723c */
        /*0290*/                   HMMA.1688.F32 R8, R2, R202, R8 ;            /* 0x000000ca0208723c */
        /*02a0*/                   HMMA.1688.F32 R12, R2, R203, R12 ;          /* 0x000000cb020c723c */
        /*02b0*/                   IMAD.SHL.U32 R7, R6, 0x2, RZ ;              /* 0x0000000206077824 */
        /*02c0*/                   UIADD3 UR4, UR4, -0x1, URZ ;                /* 0xffffffff04047890 */
        /*02d0*/              @!P1 BRA 0x300 ;                                 /* 0x0000002000009947 */
        /*02e0*/                   STS.128 [R0.X16], R4 ;                      /* 0x0000000400007388 */
        /*02f0*/                   STS.128 [R0.X16+0x1000], R8 ;               /* 0x0010000800007388 */
        /*0300*/                   ISETP.GT.AND P4, PT, R217, 0x1, PT ;        /* 0x00000001d900780c */
        /*0310*/               @P4 BRA 0x30 ;                                  /* 0xfffffd1000004947 */
        /*0320*/                   STG.E.128.SYS [R2], R4 ;                    /* 0x0000000402007386 */
        /*0330*/                   EXIT ;                                      /* 0x000000000000794d */
        /*0340*/                   VOTE.ANY R24, PT, P3 ;                      /* 0x0000000000187806 */
        /*0350*/                   BRA 0x140 ;                                 /* 0xfffffde000007947 */
        /*0360*/                   BRA 0x360;                                  /* 0xfffffff000007947 */
"""

# What a plain tile that copies the next one executes: all from 0x30 to 0x310 but the exact path and the detour.
PLAIN = {"HMMA": 8, "FP32": 1, "IMAD": 1, "ALU": 4, "MUFU": 1, "F2F": 1, "LDSM": 2, "STS": 2, "LDG": 2}
PLAIN |= {"uniform": 1, "control": 8}


@pytest.fixture(scope="module")
def issue_model() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flash_wmma_issue_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def with_labels(sass: str) -> str:
    """The same code as nvdisasm -c writes it."""
    targets = {"0x10": ".L_x_0", "0x30": ".L_x_1", "0x70": ".L_x_2", "0x140": ".L_x_3", "0x150": ".L_x_4"}
    targets |= {"0x260": ".L_x_5", "0x300": ".L_x_6", "0x340": ".L_x_7", "0x360": ".L_x_8"}
    lines = []
    for line in sass.replace(f"\t\tFunction : {NAME}", f".text.{NAME}:").splitlines():
        for target, label in targets.items():
            if line.strip().startswith(f"/*{int(target, 16):04x}*/") and f".text.{NAME}:" in lines:
                lines.append(f"{label}:")
            if "BRA" in line:
                line = line.replace(f" {target} ;", f" `({label}) ;").replace(f" {target};", f" `({label});")
        lines.append(line)
    return "\n".join(lines)


def code_of(issue_model: ModuleType, sass: str = SASS) -> list:
    return dict(issue_model.functions(sass))[NAME]


def test_reads_cuobjdump(issue_model: ModuleType) -> None:
    assert [name for name, _ in issue_model.functions(SASS)] == ["_Z5otherv", NAME]
    code = code_of(issue_model)
    assert [i.address for i in code] == list(range(0, 0x370, 0x10))  # no line of encodings taken for code, none lost
    assert (code[2].predicate, code[2].opcode, code[2].target) == ("@!P0", "BRA", 0x10)
    assert code[0x15].target == 0x260  # "BRA P1, 0x260"
    assert code[1].target is None  # -0x28 is no address
    assert code[9].opcode == "LDSM.16.M88.4"
    assert code[9].base == "LDSM"


def test_reads_nvdisasm(issue_model: ModuleType) -> None:
    text = with_labels(SASS)
    assert "`(.L_x_5)" in text
    assert ".L_x_5:" in text
    labelled, plain = code_of(issue_model, text), code_of(issue_model)
    assert [(i.address, i.opcode, i.target) for i in labelled] == [(i.address, i.opcode, i.target) for i in plain]


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("HMMA.1688.F32", "HMMA"),
        ("FFMA.FTZ", "FP32"),
        ("IMAD.MOV.U32", "IMAD"),
        ("FMNMX", "ALU"),
        ("LOP3.LUT", "ALU"),
        ("VOTE.ANY", "ALU"),
        ("MUFU.EX2", "MUFU"),
        ("F2F.F16.F32", "F2F"),
        ("HADD2.F32", "FP16"),
        ("LDSM.16.MT88.4", "LDSM"),
        ("LDL.64", "LDG"),
        ("SHFL.BFLY", "SHFL"),
        ("UIADD3", "uniform"),
        ("ULDC.64", "other"),
        ("WARPSYNC", "control"),
        ("CS2R", "other"),
    ],
)
def test_classes(issue_model: ModuleType, opcode: str, kind: str) -> None:
    assert issue_model.class_of(issue_model.Instruction(0, opcode, "")) == kind


@pytest.mark.parametrize(
    ("opcode", "moved"),
    [
        ("LDSM.16.M88.4", 512),
        ("LDSM.16.M88.2", 256),
        ("LDSM.16.M88", 128),
        ("LDS.U", 128),
        ("LDS.U.64", 256),
        ("STS.128", 512),
        ("LDG.E.128.SYS", 512),
        ("SHFL.BFLY", 128),
    ],
)
def test_bytes_of_an_access(issue_model: ModuleType, opcode: str, moved: int) -> None:
    assert issue_model.wavefront_bytes(issue_model.Instruction(0, opcode, "")) == moved


def test_shape_is_in_the_name(issue_model: ModuleType) -> None:
    shape = issue_model.shape_of(NAME)
    assert (shape.head_dim, shape.keys, shape.hmma, shape.general) == (16, 16, 8, False)
    shared_rows = issue_model.shape_of(NAME.replace("Li16ELi1ELi1ELi1ELi16", "Li256ELi4ELi2ELi1ELi32"))
    assert shared_rows.hmma == 128  # two warps share the work of 256
    assert issue_model.shape_of(NAME.replace("ProblemsE0", "ProblemsE2")).general
    assert issue_model.shape_of("_Z5otherv") is None


def test_takes_the_plain_tiles_way(issue_model: ModuleType) -> None:
    way = issue_model.plain_path(code_of(issue_model), 8)
    assert way.loop == (0x30, 0x310)  # not the prologue's
    taken = {i.address for i in way.instructions}
    assert not taken & set(range(0x160, 0x260, 0x10))  # not the exact path
    assert {0x50, 0x60, 0x2E0, 0x2F0} <= taken  # the copy of the next tile
    assert not taken & {0x340, 0x350}
    mix = Counter(issue_model.class_of(i) for i in way.instructions)
    assert dict(mix) == PLAIN


def test_a_way_has_both_products_once(issue_model: ModuleType) -> None:
    code = code_of(issue_model)
    # 12: a plain tile whose vote fails, and the exact path after it
    assert len(issue_model.plain_path(code, 12).instructions) > len(issue_model.plain_path(code, 8).instructions)
    with pytest.raises(issue_model.CannotModel, match="16 HMMA"):
        issue_model.plain_path(code, 16)
    with pytest.raises(issue_model.CannotModel, match="no loop"):
        issue_model.plain_path(code[:2], 8)
    # A plain tile's block that is none
    maximum = code_of(issue_model, SASS.replace("VOTE.ANY R24, PT, P3", "FMNMX R3, R0, R3, !PT"))
    with pytest.raises(issue_model.CannotModel, match="takes a maximum"):
        issue_model.model(NAME, maximum, issue_model.shape_of(NAME), 64)


def test_cycles(issue_model: ModuleType) -> None:
    path = issue_model.plain_path(code_of(issue_model), 8).instructions
    expected = {"tensor": 64, "FMA": 4, "ALU": 8, "XU": 16, "shared memory": 4 * 6 * 512 / 64, "issue": 31}
    assert issue_model.cycles(path, 8, 64) == expected
    assert issue_model.cycles(path, 16, 128) == expected | {"tensor": 128, "shared memory": 96}


def test_bounds(issue_model: ModuleType) -> None:
    t4, geforce = issue_model.CARDS
    assert t4.tensor_tflops == pytest.approx(65.1, abs=0.05)
    assert geforce.tensor_tflops == pytest.approx(53.8, abs=0.05)
    shape = issue_model.shape_of(NAME)
    slow, fast = (issue_model.model(NAME, code_of(issue_model), shape, width).bounds for width in (64, 256))
    assert [(b.card, b.binding) for b in slow] == [("T4", "shared memory"), ("RTX 2080 Ti", "shared memory")]
    assert [b.of_tensor_peak for b in slow] == pytest.approx([64 / 192, 128 / 192])
    assert slow[0].tflops == pytest.approx(65.13 / 3, abs=0.01)
    # With memory four times as fast the tensor cores bind
    assert [(b.binding, b.of_tensor_peak) for b in fast] == [("tensor", 1), ("tensor", 1)]


def test_program(issue_model: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kernel.sass").write_text(SASS)
    command = ["--input", str(tmp_path / "kernel.sass"), "--head-dim", "16", "--json", str(tmp_path / "model.json")]
    assert issue_model.main([*command, "--blocks"]) == 0
    said = capsys.readouterr().out
    assert "MODEL, not measured: T4" in said
    assert "loop 0x30-0x310" in said
    written = json.loads((tmp_path / "model.json").read_text())
    assert "no Turing card was measured" in written["note"]
    (instance,) = written["instances"]
    assert {kind: n for kind, n in instance["mix"].items() if n} == PLAIN
    assert instance["local_memory"] == 0
    assert [b["card"] for b in instance["bounds"]] == ["T4", "RTX 2080 Ti"]

    assert issue_model.main(["--input", str(tmp_path / "kernel.sass")]) == 2  # no d = 64, 128 or 256 in it
    assert issue_model.main(["--input", str(tmp_path / "none.so")]) == 2
    assert "none.so does not exist" in capsys.readouterr().err


def test_spills_are_counted(issue_model: ModuleType) -> None:
    code = code_of(issue_model, SASS.replace("UIADD3 UR4, UR4, -0x1, URZ", "LDL R100, [R1+0x4]"))
    found = issue_model.model(NAME, code, issue_model.shape_of(NAME), 64)
    assert found.local_memory == 1


def test_every_instance_of_the_build(issue_model: ModuleType) -> None:
    """In what was compiled here the way is found, stores the vectors it loads, and has the weights' EX2 alone."""
    objects = sorted((ROOT / "build").glob("*/csrc/forward/mma/mma_sm75.cu.o"))
    if not objects:
        pytest.skip("mma_sm75 was not compiled here")
    try:
        sass = issue_model.disassembled(objects[-1])
    except issue_model.CannotModel as why:
        pytest.skip(str(why))
    found = [(name, code, shape) for name, code in issue_model.functions(sass) if (shape := issue_model.shape_of(name))]
    assert len(found) >= 10
    for name, code, shape in found:
        assert sum(issue_model.model(name, code, shape, 64).mix.values()) > shape.hmma
        path = issue_model.plain_path(code, shape.hmma).instructions
        weights = 16 * shape.row_tiles * shape.keys // shape.dim_warps // 32  # of a lane
        assert issue_model.count(path, "MUFU.EX2") == weights + shape.general  # and one of V's exponent
        assert issue_model.count(path, "LDG.E.128") == issue_model.count(path, "STS.128") > 0

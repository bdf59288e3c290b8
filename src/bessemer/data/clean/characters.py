"""Character classes that the published filters are defined on, as ranges of code points. They are written out, not
asked of `unicodedata`, where the definition is tied to one version of Unicode: a filter must not change its mind
because Python was updated."""

from __future__ import annotations

import functools

import numpy as np


def characters(ranges: str) -> str:
    """The characters of hexadecimal ranges such as "41-5A 5F", in order."""
    ends = [[int(end, 16) for end in entry.split("-")] for entry in ranges.split()]
    return "".join(chr(i) for codes in ends for i in range(codes[0], codes[-1] + 1))


@functools.cache
def in_brackets(chosen: str) -> str:
    """The body of a regex class that matches exactly these characters, as ranges."""
    codes = np.unique(np.frombuffer(chosen.encode("utf-32-le"), np.uint32))
    breaks = np.flatnonzero(codes[1:] != codes[:-1] + 1)
    ends = zip(np.append(codes[:1], codes[breaks + 1]), np.append(codes[breaks], codes[-1:]), strict=True)
    return "".join(rf"\U{first:08x}-\U{last:08x}" for first, last in ends)


# Letters at which a word may be cut: Latin, Greek, Cyrillic, Arabic, Hebrew, the larger scripts of India, Ethiopic,
# Hangul, kana and Chinese, with their combining marks. In other scripts (Thai, say) words are only cut at white space
# and punctuation.
LETTERS = characters(
    "41-5A 61-7A C0-D6 D8-F6 F8-1BF 1C4-2AF 386 388-38F 391-3A1 3A3-3A9 3AC-3AF 3B1-3C9 3CC-3CE 400-401 403-40A "
    "40C-40D 410-451 453-45A 45C-45D 490-491 496-497 4A2-4A3 4AE-4AF 4BA-4BB 4D8-4D9 4E8-4E9 591-5F4 620-64A "
    "66E-6D5 6E5-6FF 750-77F 8A0-8BD 900-9FF B80-CFF D80-DFF 1100-137F 1D00-1D25 1D6B-1D77 1D79-1D9A 1E00-1EFF "
    "2C60-2C7B 2C7E-2C7F 2E80-2FDF 2FF0-30FF 31C0-31EF 3200-4DBF 4E00-9FFF A722-A76F A771-A787 A78B-A78E A790-A7B9 "
    "A7FA AB30-AB5A AB60-AB64 AC00-D7AF F900-FAFF FB1D-FBB1 FBD3-FD3D FD50-FDC7 FDF0-FDFB FE30-FE4F FE70-FEFC "
    "FF21-FF3A FF41-FF5A 1EE00-1EEBB 1F200-1F2FF 20000-2A6DF 2A700-2EBEF 2F800-2FA1F"
)
# A letter without case counts as both.
LOWER = "".join(letter for letter in LETTERS if not letter.istitle())
UPPER = "".join(letter for letter in LETTERS if not letter.islower() and letter not in "ǅǈǋǲ")

# Unicode's "other symbols" (arrows, boxes, dingbats, emoji) as of version 11.
SYMBOLS = characters(
    "A6 A9 AE B0 482 58D-58E 60E-60F 6DE 6E9 6FD-6FE 7F6 9FA B70 BF3-BF8 BFA C7F D4F D79 F01-F03 F13 F15-F17 "
    "F1A-F1F F34 F36 F38 FBE-FC5 FC7-FCC FCE-FCF FD5-FD8 109E-109F 1390-1399 1940 19DE-19FF 1B61-1B6A 1B74-1B7C "
    "2100-2101 2103-2106 2108-2109 2114 2116-2117 211E-2123 2125 2127 2129 212E 213A-213B 214A 214C-214D 214F "
    "218A-218B 2195-2199 219C-219F 21A1-21A2 21A4-21A5 21A7-21AD 21AF-21CD 21D0-21D1 21D3 21D5-21F3 2300-2307 "
    "230C-231F 2322-2328 232B-237B 237D-239A 23B4-23DB 23E2-2426 2440-244A 249C-24E9 2500-25B6 25B8-25C0 "
    "25C2-25F7 2600-266E 2670-2767 2794-27BF 2800-28FF 2B00-2B2F 2B45-2B46 2B4D-2B73 2B76-2B95 2B98-2BC8 "
    "2BCA-2BFE 2CE5-2CEA 2E80-2E99 2E9B-2EF3 2F00-2FD5 2FF0-2FFB 3004 3012-3013 3020 3036-3037 303E-303F 3190-3191 "
    "3196-319F 31C0-31E3 3200-321E 322A-3247 3250 3260-327F 328A-32B0 32C0-32FE 3300-33FF 4DC0-4DFF A490-A4C6 "
    "A828-A82B A836-A837 A839 AA77-AA79 FDFD FFE4 FFE8 FFED-FFEE FFFC-FFFD 10137-1013F 10179-10189 1018C-1018E "
    "10190-1019B 101A0 101D0-101FC 10877-10878 10AC8 1173F 16B3C-16B3F 16B45 1BC9C 1D000-1D0F5 1D100-1D126 "
    "1D129-1D164 1D16A-1D16C 1D183-1D184 1D18C-1D1A9 1D1AE-1D1E8 1D200-1D241 1D245 1D300-1D356 1D800-1D9FF "
    "1DA37-1DA3A 1DA6D-1DA74 1DA76-1DA83 1DA85-1DA86 1ECAC 1F000-1F02B 1F030-1F093 1F0A0-1F0AE 1F0B1-1F0BF "
    "1F0C1-1F0CF 1F0D1-1F0F5 1F110-1F16B 1F170-1F1AC 1F1E6-1F202 1F210-1F23B 1F240-1F248 1F250-1F251 1F260-1F265 "
    "1F300-1F3FA 1F400-1F6D4 1F6E0-1F6EC 1F6F0-1F6F9 1F700-1F773 1F780-1F7D8 1F800-1F80B 1F810-1F847 1F850-1F859 "
    "1F860-1F887 1F890-1F8AD 1F900-1F90B 1F910-1F93E 1F940-1F970 1F973-1F976 1F97A 1F97C-1F9A2 1F9B0-1F9B9 "
    "1F9C0-1F9C2 1F9D0-1F9FF 1FA60-1FA6D"
)

# What ends a sentence, in the scripts that FineWeb counts as ending a line well.
LINE_ENDS = characters(
    "21 2E 3F 589 61D-61F 6D4 700-702 7F9 837 839 83D-83E 964-965 104A-104B 1362 1367-1368 166E 1735-1736 17D4-17D6 "
    "17D9-17DA 1803 1809 1944-1945 1AA8-1AAB 1B5A-1B5B 1B5E-1B5F 1B7D-1B7E 1C3B-1C3C 1C7E-1C7F 203C-203D 2047-2049 "
    "2E2E 2E3C 2E53-2E54 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F A9C8-A9C9 AA5D-AA5F AAF0-AAF1 ABEB "
    "FE52 FE56-FE57 FF01 FF0E FF1F FF61 10A56-10A57 10F55-10F59 10F86-10F89 11047-11048 110BE-110C1 11141-11143 "
    "111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C 112A9 1144B-1144C 115C2-115C3 115C9-115D7 11641-11642 "
    "1173C-1173E 11944 11946 11A42-11A43 11A9B-11A9C 11C41-11C42 11EF7-11EF8 11F43-11F44 16A6E-16A6F 16AF5 "
    "16B37-16B38 16B44 16E98 1BC9F 1DA88"
)
# The same without Khmer, Samaritan and the marks that came late: what the count of sentences goes by.
SENTENCE_ENDS = frozenset(LINE_ENDS) - frozenset(
    characters("61D-61E 837-83E 17D4-17DA 1B7D-1B7E 2E53-2E54 10F55-10F89 11944-11946 11EF7-11F44 16E98")
)

# A word made only of these is a symbol to the Gopher rules. Control characters are among them, tab and newline are
# not; of the digits only a full-width one is, as in the rules that reproduce FineWeb.
PUNCTUATION = frozenset(
    "!/—”:％１〈&(、━\\【#%「」，】；+^]~“《„';’{|∶´[=-`*．（–？！：$～«〉,><》)?）。…@_.\"}►»"
    + characters("0-8 B-1F 7F-9F")
    + LINE_ENDS
)

"""Words of English whose split no rule gives: contractions, abbreviations that keep their full stop, emoticons.
`FIXED` maps a piece of text to its words. It is built once, from the few hundred cases written here."""

from __future__ import annotations

from collections.abc import Iterator

# What may follow a word, with an apostrophe or without: I'll, Ill. Each is cut off as a word of its own.
_WILL = ("'ll", "'ll 've", "'d", "'d 've")
_ENDINGS = {
    "i": (*_WILL, "'m", "'m a", "'ve"),
    "you we they": (*_WILL, "'ve", "'re"),
    "he she it": (*_WILL, "'s"),
    "who what when where why how there": (*_WILL, "'s", "'re", "'ve"),
    "that this": (*_WILL, "'s"),
    "these those": (*_WILL, "'re", "'ve"),
    "ca could do does did had may might must need ought sha should wo would": ("n't", "n't 've"),
    "could might must should would": ("'ve",),
    "ai are is was were have has dare": ("n't",),
    "not": ("'ve",),
}
_NOT_CONTRACTIONS = "Ill ill Its its Hell hell Shell shell Shed shed were Were Well well Whore whore"
_CUT = "y' all|y all|how 'd 'y|How 'd 'y|can not|Can not|gon na|Gon na|got ta|Got ta|let 's|Let 's|c'm on|C'm on"
_HOURS = ("a.m.", "am", "p.m.", "pm")
_DEGREES = "cfkCFK"

# Kept whole. Single letters with a full stop are initials or items of a list.
_WHOLE = r"""
doin doin' Doin Doin' goin goin' Goin Goin' nothin nothin' Nothin Nothin' nuthin nuthin' Nuthin Nuthin' ol ol' Ol Ol'
somethin somethin' Somethin Somethin' lovin lovin' Lovin Lovin' havin havin' Havin Havin' em 'em ll 'll nuff 'nuff
' '' \") <space> C++ \t \n — 's 'S ‘s ‘S 'd 're 'cause 'Cause 'cos 'Cos 'coz 'Coz 'cuz 'Cuz 'bout and/or w/o ma'am
Ma'am o'clock O'clock
a. b. c. d. e. f. g. h. i. j. k. l. m. n. o. p. q. r. s. t. u. v. w. x. y. z. ä. ö. ü.
Ak. Ala. Apr. Ariz. Ark. Aug. Calif. Colo. Conn. Dec. Del. Feb. Fla. Ga. Ia. Id. Ill. Ind. Jan. Jul. Jun. Kan. Kans.
Ky. La. Mar. Mass. Mich. Minn. Miss. Mt. N.C. N.D. N.H. N.J. N.M. N.Y. Neb. Nebr. Nev. Nov. Oct. Okla. Ore. Pa. S.C.
Sep. Sept. Tenn. Va. Wash. Wis.
a.m. p.m. Adm. Bros. co. Co. Corp. D.C. Dr. e.g. E.g. E.G. Gen. Gov. i.e. I.e. I.E. Inc. Jr. Ltd. Md. Messrs. Mo.
Mont. Mr. Mrs. Ms. Ph.D. Prof. Rep. Rev. Sen. St. vs. v.s.
:) :-) :)) :-)) :))) :-))) (: (-: =) (= :] :-] [: [-: [= =] :o) (o: :} :-} 8) 8-) (-8 ;) ;-) (; (-; :( :-( :(( :-((
:((( :-((( ): )-: =( >:( :') :'-) :'( :'-( :/ :-/ =/ =| :| :-| ]= =[ :1 :P :-P :p :-p :O :-O :o :-o :0 :-0 :() >:o
:* :-* :3 :-3 =3 :> :-> :X :-X :x :-x :D :-D ;D ;-D =D xD XD xDD XDD 8D 8-D
^_^ ^__^ ^___^ >.< >.> <.< ._. ;_; -_- -__- v.v V.V v_v V_V o_o o_O O_o O_O 0_o o_0 0_0 o.O O.o O.O o.o 0.0 o.0 0.o
@_@ <3 <33 <333 </3 (^_^) (-_-) (._.) (>_<) (*_*) (¬_¬) ಠ_ಠ ಠ︵ಠ (ಠ_ಠ) ¯\(ツ)/¯ (╯°□°）╯︵┻━┻ ><(((*>
"""


def _contractions() -> Iterator[tuple[str, ...]]:
    for heads, endings in _ENDINGS.items():
        for head in [form for word in heads.split() for form in (word, word.title())]:
            for ending in endings:
                yield (head, *ending.split())
                yield (head, *ending.replace("'", "").split())


def _fixed() -> dict[str, tuple[str, ...]]:
    found = {"".join(words): words for words in _contractions()}
    for word in _NOT_CONTRACTIONS.split():
        found.pop(word, None)
    cut = [tuple(words.split()) for words in _CUT.split("|")]
    cut += [(str(hour), half) for hour in range(1, 13) for half in _HOURS]
    cut += [("°", degree, ".") for degree in _DEGREES]
    found.update(("".join(words), words) for words in cut)
    found.update((word, (word,)) for word in _WHOLE.split())
    curly = {text: words for text, words in found.items() if "'" in text}
    for text, words in curly.items():
        found[text.replace("'", "’")] = tuple(word.replace("'", "’") for word in words)
    return found


FIXED = _fixed()
LONGEST = max(map(len, FIXED))

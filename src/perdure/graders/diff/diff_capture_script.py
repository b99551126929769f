"""The shell scripts of `diff_capture.py`. They run in a sandbox, on a tree that hostile code has made."""

RENAMED_GIT_DIR = ".git.perdure-aside"
BASE_IS_UNREADABLE, TOO_MUCH = 3, 4
"""Exit codes of `CAPTURE`."""

# Files in the sandbox's TMPDIR disappear with the sandbox, even if /tmp is the host's. The variable
# comes from the spec or the image, never from the agent. `git` would capture a folder in the tree.
_TEMPORARY = """
temporary=${TMPDIR:-/tmp}
[ -w "$temporary" ] || chmod u+rwx "$temporary" 2>/dev/null
[[ $temporary = /* && $temporary/ != "$PWD"/* && -w $temporary ]] || temporary=/tmp
"""

PREPARE = (
    _TEMPORARY
    + r"""
git --version >/dev/null || exit
copy=$temporary/$1
mkdir "$copy" && cp -a .git/. "$copy" && printf %s "$copy"
"""
)

# The capture is one exec. Most of its cost is starting processes, so a small change starts few.
# A private git directory holds our own configuration, so git never looks up the agent's hooks,
# filters, fsmonitor or textconv. Git starts from the pristine index and so hashes few files: it
# takes a file as unchanged only if its ctime is, and no process can set a ctime. FIFOs are removed
# first, because git would block for ever on a .gitignore that is a FIFO. `repair` is the second
# try: it moves nested repositories away, disables attributes, and leaves out what git refuses. Exit
# codes: 3 the base cannot be read, 4 the change is too large.
CAPTURE = (
    r"""
tree=$1 base=$2 name=$3 mode=$4 aside=$5 max_bytes=$6 max_files=$7 forced=$8
cd "$tree" 2>/dev/null || { chmod u+rwx "$tree" && cd "$tree"; } || exit 5
"""
    + _TEMPORARY
    + r"""
own=$temporary/$name
unset "${!GIT_@}"
mkdir -p "$own/objects" "$own/info" "$own/refs" || exit 5
exec 9>&2 2>"$own/said"
ignored=0 changed=0
finish() {
  code=$?
  { [ ! -s "$own/said" ] || head -c 2000 "$own/said"
    printf . 2>/dev/null >"$own/room" || printf '\nthe disk of the sandbox is full'
    printf '\n%s\n%d %d\0' "$name" "$ignored" "$changed"
    [ ! -s "$own/dropped" ] || head -z -n 100 "$own/dropped"; } >&9
  rm -rf "$own"
  exit $code
}
trap finish EXIT
drop() { printf '%s: %s\0' "$1" "$2" >>"$own/dropped"; }
drop_all() {  # of the paths in a file
  [ -s "$2" ] || return 0
  while IFS= read -r -d '' path; do drop "$1" "$path"; done < <(head -z -n 100 "$2")
}

if [ -z "$base" ]; then base=$own/base; mkdir "$base"; tar -xf - -C "$base" || exit 5; fi
[ -r "$base/HEAD" ] && [ -d "$base/objects" ] || { echo "no repository at $base" >&2; exit 3; }
if [ "$mode" = repair ]; then
  # Ignored files are not captured, and may be what fills the disk.
  head -c "$max_bytes" /dev/zero >"$own/room" 2>/dev/null || git --git-dir="$base" \
    --work-tree=. -c core.fsmonitor=false -c core.excludesFile=/dev/null clean -ffdXq
  rm -f "$own/room"
fi
cp -r --preserve=timestamps "$base/HEAD" "$base/refs" "$base/packed-refs" "$base/info" \
  "$base/index" "$own/" 2>/dev/null
printf '\n%s\n' "$aside" >>"$own/info/exclude"
printf '%s\n' '[core]' 'repositoryformatversion = 0' 'bare = false' 'fileMode = true' \
  'symlinks = true' 'autocrlf = false' 'hooksPath = /dev/null' 'fsmonitor = false' \
  'untrackedCache = false' 'excludesFile = /dev/null' 'attributesFile = /dev/null' \
  'protectNTFS = false' 'protectHFS = false' 'preloadIndex = false' 'looseCompression = 0' \
  >"$own/config" || exit 5
export HOME=$own XDG_CONFIG_HOME=$own LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
export GIT_DIR=$own GIT_WORK_TREE=$PWD GIT_ALTERNATE_OBJECT_DIRECTORIES=$base/objects

outside=(. -path ./.git -prune -o)
control=(-name .gitignore -o -name .gitattributes)
look() {  # also removes what git would wait for
  find "${outside[@]}" -name "$aside" -prune -fprintf "$own/nested" '%P\0' -o \
    \( -type p -o -type s -o -type b -o -type c -o \
      \( "${control[@]}" \) \( -xtype p -o -xtype c \) \) \
    -fprintf "$own/special" '%P\0' -exec rm -f {} + -o \
    \( -type d ! -perm -u=rwx -o -type f ! -perm -u=r \) -fprintf "$own/closed" x -o \
    -type f -size +"${max_bytes}c" -fprintf "$own/large" '%P\0'
}
look 2>/dev/null
if [ -s "$own/closed" ] || [ "$mode" = repair ]; then
  mv "$own/special" "$own/special.first"
  [ ! -s "$own/closed" ] || chmod -R u+rwX . 2>/dev/null
  if [ "$mode" = repair ]; then
    printf '* !text !eol !ident !filter !working-tree-encoding !diff\n' >"$own/info/attributes"
    find "${outside[@]}" -iname .git -prune -exec bash -c \
      'for path; do to=${path%????}$0; rm -rf "$to" && mv -T "$path" "$to" || rm -rf "$path"; done' \
      "$aside" {} +
    keep_going=--ignore-errors
  fi
  look
  cat "$own/special.first" >>"$own/special"
fi
[ ! -s "$own/nested" ] || sed -zi 's/\.perdure-aside$//' "$own/nested"
drop_all 'a repository' "$own/nested"
drop_all 'not a file' "$own/special"
[ -f "$own/index" ] || git read-tree HEAD || exit 3

# Also refreshes the index by reading alone; `add` would store again whatever looks touched.
git status --porcelain -z --ignored -uall --no-renames >"$own/status" || exit 5
tracked=0 new=0
if mapfile -d '' -t -n 1000 entries <"$own/status" 2>/dev/null && [ ${#entries[@]} -lt 1000 ]; then
  for entry in "${entries[@]}"; do
    case $entry in '!!'*) ignored=$((ignored + 1)) ;; '??'*) new=$((new + 1)) ;; *) tracked=$((tracked + 1)) ;; esac
  done
else
  ignored=$(grep -zc '^!!' "$own/status")
  new=$(grep -zc '^??' "$own/status")
  tracked=$(grep -zvc -e '^!!' -e '^??' "$own/status")
fi
changed=$((tracked + new))

specs=(.)
if [ -s "$own/large" ]; then
  while IFS= read -r -d '' path; do  # a file that alone exceeds the cap
    git --literal-pathspecs ls-files -om --exclude-standard -- "$path" | grep -q . || continue
    specs+=(":(exclude,literal)$path")
    drop 'too large' "$path"
  done < <(head -z -n 100 "$own/large")
fi

[ "$tracked" -le "$max_files" ] || exit 4
: >"$own/left_out"
# What a tool made may go, if all of it would be too much: first folders with a known name, then
# large folders that the base does not have, then every file that it does not have.
leave_out() {
  generated=(.venv venv node_modules __pycache__ .tox .nox .eggs .mypy_cache .pytest_cache
    .ruff_cache .hypothesis build dist target)
  few=("${specs[@]}")
  [ "$1" -ge 1 ] || return 0
  for name_of in "${generated[@]}"; do few+=(":(exclude,glob)**/$name_of/**"); done
  while IFS= read -r -d '' path; do few+=(":(exclude,literal)$path")
  done < <(find "${outside[@]}" -name pyvenv.cfg -printf '%P\0' | head -z -n 20 |
    sed -z 's,/\?pyvenv.cfg$,,')
  [ "$1" -ge 2 ] || return 0
  while IFS= read -r -d '' path; do
    [[ $path = */ ]] || continue
    [ -z "$(find "./$path" -type f | sed -n '200{p;q}')" ] &&
      [ "$(du -s --apparent-size --block-size=1 "./$path" | cut -f1)" -le 1048576 ] && continue
    few+=(":(exclude,literal)${path%/}")
    printf '%s\0' "$path" >>"$own/left_out"
  done < <(git ls-files -oz --exclude-standard --directory --no-empty-directory -- "${few[@]}" |
    head -z -n 500)
}
sum() { total=0; while read -r number; do total=$((total + number)); done; echo "$total"; }
untracked() { git ls-files -oz --exclude-standard -- "${few[@]}"; }

add() { git add --no-warn-embedded-repo ${keep_going-} "$@" >&2 || [ -n "${keep_going-}" ]; }
write_diff() {  # fails if there is more than fits
  git diff-index --cached -p --binary --full-index --no-color --no-ext-diff --no-textconv \
    --no-renames --src-prefix=a/ --dst-prefix=b/ HEAD |
    { head -c "$max_bytes" >"$own/diff" || exit 5; IFS= read -r -d '' -n 1; }
  case ${PIPESTATUS[*]} in "0 1") ;; "0 0" | "141 0") return 1 ;; *) exit 5 ;; esac
}
few_and_small() { [ "$new" -le 4 ] && [ ! -s "$own/large" ]; }
for level in 0 1 2 3; do
  [ $level = 0 ] || cp --preserve=timestamps "$base/index" "$own/index" 2>/dev/null ||
    { rm -f "$own/index" && git read-tree HEAD; } || exit 5
  leave_out $level
  left=0
  if [ $level = 0 ] && few_and_small; then
    left=$new
    [ $((tracked + left)) -le "$max_files" ] || continue
  elif [ $level -lt 3 ]; then
    left=$(untracked | tr -dc '\0' | wc -c)
    [ $((tracked + left)) -le "$max_files" ] || continue
    [ "$(untracked | xargs -0 -r stat -c %s -- 2>/dev/null | sum)" -le $((max_bytes * 4)) ] || continue
  fi
  [ $level = 0 ] || add -u -- "${specs[@]}" || exit 5
  [ $level = 3 ] || add -A -- "${few[@]}" || exit 5
  [ ! -s "$forced" ] || GIT_LITERAL_PATHSPECS=1 add -f --pathspec-from-file="$forced" --pathspec-file-nul
  write_diff && break
  [ $level -lt 3 ] || exit 4
done
[ $level -lt 3 ] || [ -s "$own/diff" ] || exit 4
[ $level = 0 ] || drop generated "$((changed - tracked - left)) untracked files, as in build or node_modules"
if [ -s "$own/left_out" ]; then
  sort -zu "$own/left_out" | sed -z 's,/$,,' >"$own/generated"
  drop_all 'generated' "$own/generated"
fi
if [ -n "${keep_going-}" ]; then
  while IFS= read -r line; do drop 'refused by git' "${line:0:300}"
  done < <(grep -a '^error: ' "$own/said" | head -n 50)
fi
cat "$own/diff"
"""
)

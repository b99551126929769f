"""Reduces a repository that came with an image to its base, without earlier or later commits.

Such a repository is often a full clone whose later commits hold the fix. Only the parts listed here
are copied into a new git directory, so unknown hiding places are lost too. The sandbox needs bash,
git and find.
"""

from perdure.errors import InstanceError
from perdure.sandboxes.base import Sandbox

LIMIT_S = 600.0


async def cut_history(sandbox: Sandbox, base_commit: str | None) -> None:
    """Before hostile code runs, remove all commits except `base_commit` to HEAD.

    Commit ids, the index and the working tree do not change. A second call changes nothing, or
    completes an interrupted first one. Nested repositories and submodules keep only their HEAD.
    Raises: InstanceError when there is no repository at the workdir, or it cannot be rewritten.
    """
    argv = ["bash", "-c", _SCRIPT, "cut", base_commit or ""]
    result = await sandbox.exec(argv, cwd=sandbox.workdir, timeout=LIMIT_S)
    if not result.status.ok:
        said = result.stderr[-300:].decode("utf-8", "replace").strip()
        raise InstanceError(
            f"`environment.workdir`: the history of the git repository at {sandbox.workdir} cannot be "
            f"removed: {said or result.status}"
        )


# Git treats a commit named in `shallow` as one without parents, so its id does not change. Entries
# move one by one, because an overlay cannot rename a folder of a lower layer. `cut.done` is a
# complete new git directory inside the old one; `cut.last` holds the entries still to move after
# the old ones are removed.
_SCRIPT = r"""
set -u
unset "${!GIT_@}"
shopt -s nullglob dotglob
export LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_NO_REPLACE_OBJECTS=1
kept='^(core\.(filemode|symlinks|ignorecase|autocrlf|eol|safecrlf|bare|worktree)|user\..*|filter\..*'
kept+='|extensions\.objectformat)$'

fail() { echo "$1" >&2; exit 3; }

git_in() { local folder=$1; shift; git --git-dir="$folder" -c safe.directory='*' "$@"; }

replace() { # $1: a git directory
  local path
  if [ -d "$1/cut.done" ]; then
    for path in "$1"/*; do
      case ${path##*/} in cut.done|modules) continue;; esac
      rm -rf "$path" || fail "cannot remove $path"
    done
    mv -T "$1/cut.done" "$1/cut.last" || fail "cannot write to $1"
  fi
  for path in "$1"/cut.last/*; do mv -T "$path" "$1/${path##*/}" || fail "cannot write to $1"; done
  rm -rf "$1/cut.last" || fail "cannot finish $1"
}

cut() { # $1: a git directory, $2: its base commit or nothing
  local old=$1 new=$1/cut.new head base branch commit parent outside
  local -a commits line
  local -A known=()
  if [ -d "$old/cut.done" ] || [ -d "$old/cut.last" ]; then replace "$old"; return; fi
  rm -rf "$new"
  head=$(git_in "$old" rev-parse -q --verify 'HEAD^{commit}') || return 1
  commits=("$head")
  if base=$(git_in "$old" rev-parse -q --verify "${2:-HEAD}^{commit}") &&
      git_in "$old" merge-base --is-ancestor "$base" "$head"; then
    mapfile -t commits < <(git_in "$old" rev-list "$head" --not "$base^@")
    [ "${commits[*]}" ] || fail "cannot list the commits of $old"
  fi
  mkdir -p "$new"/objects/{pack,info} "$new"/refs/{heads,tags} "$new/info" ||
    fail "cannot write to $old"
  for commit in "${commits[@]}"; do known[$commit]=1; done
  while read -r -a line; do
    outside=0
    for parent in "${line[@]:1}"; do [ "${known[$parent]-}" ] || outside=1; done
    [ ${#line[@]} -gt 1 ] && [ $outside = 0 ] || echo "${line[0]}"
  done < <(git_in "$old" rev-list --parents --no-walk=unsorted "${commits[@]}") >"$new/shallow"
  { while read -r commit; do echo "--shallow $commit"; done <"$new/shallow"
    printf '%s\n' "${commits[@]}"
  } | git_in "$old" pack-objects --revs --indexed-objects -q "$new/objects/pack/pack" >/dev/null ||
    fail "cannot read the objects of $head"
  branch=$(git_in "$old" symbolic-ref -q HEAD)
  case $branch in
    refs/heads/*) mkdir -p "$new/${branch%/*}" && echo "$head" >"$new/$branch" &&
      echo "ref: $branch" >"$new/HEAD";;
    *) echo "$head" >"$new/HEAD";;
  esac
  cp -p "$old"/index "$old"/sharedindex.* "$new/" 2>/dev/null
  cp -p "$old"/info/exclude "$old"/info/attributes "$old"/info/sparse-checkout "$new/info/" 2>/dev/null
  git config --file "$new/config" core.repositoryformatversion \
    "$(git_in "$old" config --default 0 core.repositoryformatversion)"
  while read -r line; do
    git config --file "$new/config" "$line" "$(git_in "$old" config --local --get "$line")"
  done < <(git_in "$old" config --local --name-only --get-regexp "$kept")
  GIT_WORK_TREE=. git_in "$new" rev-list --objects --quiet HEAD || fail "the new repository is not complete"
  mv -T "$new" "$old/cut.done" || fail "cannot write to $old"
  replace "$old"
}

command -v find >/dev/null || fail "the image lacks find"
# After an interruption the folder may lack HEAD, so git is not asked where it is.
top=.git
[ ! -f .git ] || { read -r _ top <.git; }
[ -d "$top" ] || fail "there is no repository"
[ ! -e "$top/commondir" ] || fail "it is a linked worktree: give the image a plain clone"
cut "$top" "$1" || fail "HEAD names no commit"
mapfile -d '' -t others < <(
  find . -path ./.git -prune -o -name .git -type d -prune -print0
  [ ! -d "$top/modules" ] || find "$top/modules" -name objects -type d -prune -print0
)
for other in "${others[@]}"; do cut "${other%/objects}" "" || rm -rf "${other%/objects}"; done
"""

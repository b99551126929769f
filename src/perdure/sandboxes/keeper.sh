#!/bin/sh
# Keeps one sandbox from the host's side: starts its commands, enforces their deadlines and writes
# their results, whether or not a worker still watches. Its sandbox cannot see or signal it.
#
# usage: keeper.sh BOX GROUPS OOM BOOT [PROCS...]     in a session of its own
#   BOX     the sandbox's folder      GROUPS  where each command gets a cgroup of its own, or -
#   OOM     file with an oom_kill count, or -     BOOT    script that boots the holder, or -
#   PROCS   cgroup.procs files that every command joins before it runs
#
# Joining a cgroup from idle waits about 13 ms for the kernel, so the next command's process is
# forked and joined ahead of time (the standby) and a request only wakes it.

box=$1 groups=$2 oom=$3 boot=$4
shift 4
cd "$box" || exit 1

whoami() {
    read -r stat </proc/self/stat
    set -- $stat
    me="$1 ${22}"
}

oom_kills() {
    kills=0
    [ "$oom" = - ] && return
    while read -r key value; do
        [ "$key" = oom_kill ] && kills=$value
    done <"$oom"
}

run() {  # joins, waits for a request, becomes the command
    joined=yes
    for procs in "$@"; do
        echo 0 >"$procs" || joined=no
    done
    [ "$group" = - ] || echo 0 >"$group/cgroup.procs" || joined=no
    read -r id <"$slot"
    oom_kills
    set -C # the guard: whoever creates `pid` runs the command, a second request does nothing
    echo "$me $group $kills" >"execs/$id/pid" || exit 0
    set +C
    echo "$id" >"$slot.id"
    if [ $joined = no ]; then # never run without its limits
        echo sandbox >"execs/$id/cause"
        read -r self rest </proc/self/stat
        kill -9 "$self"
    fi
    . "./execs/$id/run"
}

report() {  # `jobs` tells an exit code from a signal, `$?` does not
    [ -f "$slot.id" ] || exit 0
    read -r id <"$slot.id"
    IFS= read -r how <"$slot.end"
    case $how in
    *Done | *"Done "*) facts= ;;
    *)
        oom_kills
        facts=" oom=$kills"
        [ "$boot" = - ] || [ -f "execs/$id/cause" ] || holder_lives || facts="$facts holder=gone"
        ;;
    esac
    echo "$how$facts" >"execs/$id/rc"
    [ -f "execs/$id/watch" ] && read -r watch <"execs/$id/watch" && kill "$watch" 2>/dev/null
}

holder_lives() {  # a dying holder takes its processes along before it is gone itself
    case $how in *Killed*) sleep 0.05 ;; esac
    read -r pid started <holder
    read -r stat 2>/dev/null <"/proc/$pid/stat" || return 1
    set -- $stat
    [ "${22}" = "$started" ] && [ "$3" != Z ] && [ "$3" != X ]
}

standby() {  # its pipe and its cgroup are made ahead by `start`, which is cheaper than here
    slot=slots/x$n
    [ -p "$slot" ] || mkfifo "$slot"
    group=-
    if [ "$groups" != - ]; then
        group=$groups/x$n
        [ -d "$group" ] || mkdir "$group"
    fi
    (
        whoami
        (run "$@") &
        { wait; jobs; } >"$slot.end" 2>&1
        report
    ) </dev/null >/dev/null 2>>log &
}

watch() {  # $1 exec id, $2 seconds
    trap 'kill $! 2>/dev/null; exit' TERM
    sleep "$2" &
    wait
    [ -s "execs/$1/rc" ] && exit
    set -C
    echo timeout 2>/dev/null >"execs/$1/cause"
    set +C
    kill_tree "$1"
}

kill_tree() {
    if [ "$group" = - ]; then
        read -r comment digest token <"execs/$1/run"
        read -r shim rest <"execs/$1/pid"
        while pids=$(marked "$token"; below "$shim") && [ -n "$pids" ]; do
            kill -9 $pids 2>/dev/null
            [ -s "execs/$1/rc" ] && [ -z "$(marked "$token")" ] && break
            sleep 0.01
        done
    elif [ -f "$group/cgroup.kill" ]; then
        echo 1 >"$group/cgroup.kill"
    else
        while read -r pid <"$group/cgroup.procs"; do
            while read -r pid; do kill -9 "$pid"; done <"$group/cgroup.procs"
        done
    fi
}

marked() {
    for file in $(grep -slazx "PERDURE_EXEC=$1" /proc/[0-9]*/environ); do
        file=${file#/proc/}
        echo "${file%/environ}"
    done
}

below() {
    for child in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do
        echo "$child"
        below "$child"
    done
}

hold() {  # boots the holder and pins its namespaces: a reused pid must never be entered
    . "$boot"
    read -r line <up || exit 1
    while read -r key value; do
        [ "$key" = '"child-pid":' ] && pid=${value%,}
    done <info
    read -r stat <"/proc/$pid/stat" || exit 1
    for procs in "$@"; do
        echo "$pid" >"$procs" || exit 1
    done
    [ "$groups" = - ] || echo "$pid" >"$groups/holder/cgroup.procs" || exit 1
    exec 3<"/proc/$pid/ns/user" 4<"/proc/$pid/ns/mnt" 5<"/proc/$pid/ns/pid" \
        6<"/proc/$pid/ns/net" 7<"/proc/$pid/ns/ipc" 8<"/proc/$pid/ns/uts" \
        9<"/proc/$pid/ns/cgroup"
    started=$(set -- $stat && echo "${22}")
    echo "$pid $started" >holder
    echo go >go # only now may it have children: they are born inside the cgroups
}

carry() {  # starts the way to the gateway and waits until it listens
    (. ./gateway) >up &
    read -r port <up || exit 1
    echo "$port" >port
}

whoami
echo "$me" >keeper
exec <>requests
n=0
standby "$@"
[ "$boot" = - ] || hold "$@"
[ ! -f gateway ] || carry
echo yes >ready
echo ready
exec >/dev/null 2>>log
while read -r id timeout; do
    if [ "$timeout" != - ]; then
        watch "$id" "$timeout" </dev/null >/dev/null &
        echo $! >"execs/$id/watch"
    fi
    echo "$id" >"$slot" # waits until the standby has joined its cgroups
    n=$((n + 1))
    standby "$@"
    jobs >/dev/null # reaps what has ended
done

#!/bin/sh
# Runs a Python program where it can reach nothing but the interpreter: sandbox.sh ROOT PYTHON SECONDS UID DIRECTORY...
#
# Called by `unshare`, in mount, process, network and IPC namespaces of its own. ROOT is an empty directory, ROOT.py the program; ROOT becomes the
# root of a file system in memory that has DIRECTORY... to read and /tmp to write. UID: the user that the program runs as, 0 for those of a user
# namespace, without capabilities. The clock is in here, so that it runs out without the caller too.
set -e
root=$1 python=$2 seconds=$3 uid=$4
shift 4
mount -t tmpfs -o size=64m,mode=755 tmpfs "$root"
mkdir -m 1777 "$root/tmp"
mkdir "$root/dev" "$root/old" "$root/proc"
cp "$root.py" "$root/main.py"
: > "$root/dev/null"
mount --bind /dev/null "$root/dev/null"
for directory in /usr /bin /lib /lib64 "$@"; do
    if [ -L "$directory" ]; then
        cp -P "$directory" "$root$directory"
    elif [ -d "$directory" ] && [ ! -e "$root$directory" ]; then
        mkdir -p "$root$directory"
        mount --rbind "$directory" "$root$directory"
        mount -o remount,bind,ro,nosuid "$root$directory"
    fi
done
cd "$root"
pivot_root . old
cd /
mount -t proc proc /proc
umount -l /old
rmdir /old
cd /tmp
drop="--inh-caps=-all --bounding-set=-all --no-new-privs"
[ "$uid" = 0 ] || drop="$drop --reuid=$uid --regid=$uid --clear-groups"
exec env -i PATH=/usr/bin:/bin HOME=/tmp OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 \
    timeout -s KILL "$seconds" setpriv $drop \
    prlimit --as=1073741824 --nproc=32 --fsize=33554432 --nofile=256 --core=0 --cpu="$seconds" -- \
    "$python" -I /main.py

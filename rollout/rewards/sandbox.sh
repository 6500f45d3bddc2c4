#!/bin/sh
# Runs a Python program where it can reach nothing but the interpreter: sandbox.sh ROOT PYTHON SECONDS UID DIRECTORY...
#
# Called by `unshare`, in mount, process, network and IPC namespaces of its own. ROOT is an empty directory, ROOT.py the program; ROOT becomes the
# root of a file system in memory, and below it `jail` that of the program: DIRECTORY... to read and /tmp to write. In a chroot the kernel makes no
# user namespaces, and so no other file system in memory. UID: the user that the program runs as, 0 for those of a user namespace, without
# capabilities. The clock is in here, so that it runs out without the caller too.
set -e
root=$1 python=$2 seconds=$3 uid=$4
shift 4
mount -t tmpfs -o size=64m,mode=755 tmpfs "$root"
jail="$root/jail"
mkdir "$root/old" "$jail" "$jail/dev" "$jail/proc"
mkdir -m 1777 "$jail/tmp"
cp "$root.py" "$jail/main.py"
: > "$jail/dev/null"
mount --bind /dev/null "$jail/dev/null"
for directory in /usr /bin /lib /lib64 "$@"; do
    if [ -L "$directory" ]; then
        cp -P "$directory" "$jail$directory"
    elif [ -d "$directory" ] && [ ! -e "$jail$directory" ]; then
        mkdir -p "$jail$directory"
        mount --rbind "$directory" "$jail$directory"
        mount -o remount,bind,ro,nosuid "$jail$directory"
    fi
done
ln -s jail/usr jail/bin jail/lib jail/lib64 jail/proc "$root"
cd "$root"
pivot_root . old
cd /
mount -t proc proc /jail/proc
echo 0 2> /old/dev/null > /proc/sys/kernel/shmall || :
umount -l /old
rmdir /old
drop="--inh-caps=-all --bounding-set=-all --no-new-privs"
[ "$uid" = 0 ] || drop="$drop --reuid=$uid --regid=$uid --clear-groups"
exec chroot /jail env -i -C /tmp PATH=/usr/bin:/bin HOME=/tmp OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 \
    timeout -s KILL "$seconds" setpriv $drop \
    prlimit --as=1073741824 --nproc=32 --fsize=33554432 --nofile=256 --core=0 --cpu="$seconds" -- \
    "$python" -I /main.py
